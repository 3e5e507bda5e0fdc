"""A network made for fixed atoms: radial tables, lists of fixed size, one program in which the host never waits for the GPU."""
