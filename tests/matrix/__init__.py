"""Matrix of Dask's features: programs that run with and without the plugin, and must observe the same."""
