"""Suites of programs that others wrote, run under Dask and under the plugin."""
