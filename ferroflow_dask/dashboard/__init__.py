"""What happens on a cluster, to look at: a page of Dask's dashboard, a terminal, a report, a trace."""
