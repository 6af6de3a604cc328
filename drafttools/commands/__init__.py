"""One module per subcommand; each has `register(app)`, which adds its command to the typer application."""
