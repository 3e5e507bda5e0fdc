"""Shared helpers that are independent of any network: checks of arguments, units, files, atoms, signals."""
