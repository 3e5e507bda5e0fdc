"""Which atoms are near to each other: a plain search, and lists of fixed size."""
