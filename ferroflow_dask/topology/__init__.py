"""Topology of a cluster: workers, hosts, links and the costs of Dask, read from YAML.

It imports neither Dask nor the engines that simulate on it.
"""

from ferroflow_dask.topology.parts import Group, Host, Link, Runtime, Worker
from ferroflow_dask.topology.read import load_topology, preset_names, topology_from_dict, topology_from_yaml
from ferroflow_dask.topology.topology import Route, Topology

__all__ = [
    "Group",
    "Host",
    "Link",
    "Route",
    "Runtime",
    "Topology",
    "Worker",
    "load_topology",
    "preset_names",
    "topology_from_dict",
    "topology_from_yaml",
]
