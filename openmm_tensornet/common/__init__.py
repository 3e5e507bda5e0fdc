"""What everything else needs and nothing of it knows a network: checks of arguments, units, files, atoms, signals."""
