"""Batching: intervals between batches of messages that depend on the load of the sender."""
