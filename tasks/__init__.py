"""Stations of a flow: one call into `tlt_core` each."""
