"""Bundling: any Dask graph in fewer tasks, cut so that the predicted makespan is least.

This package knows Dask's graphs and a cluster's measured overheads. It does not import onnx, kernels, devices
or the graph of ops.
"""
