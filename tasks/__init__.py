"""Stations of a flow: load, one call into `tlt_core`, save, return a reference."""
