"""Prefect flows, and the command `tlt`."""
