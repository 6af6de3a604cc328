"""Acceptance length as a measurement: read it, pool it, judge two arms, report.

`sources.read` turns one log, scrape, bench result or URL into a `records.Run`; `judge.compare` sets two lists of runs
against each other; `render` writes tables, HTML and PNG. No module here imports torch or vLLM.
"""
