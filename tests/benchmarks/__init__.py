"""What the shim costs: `python -m tests.benchmarks.cost` prints ratios from one run; a test holds the bounds."""
