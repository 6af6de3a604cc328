"""The ways in besides `import drafttools`: sitecustomize, the launcher, and the vLLM plugin. Standard library only."""
