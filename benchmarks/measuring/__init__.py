"""The parts of the benchmarks: servers to measure, load, accounts, results."""
