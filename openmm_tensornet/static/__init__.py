"""A network made for fixed atoms: tables of its radial functions, lists of fixed size, one program without a synchronisation."""
