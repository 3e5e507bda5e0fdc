"""OpenMM: forces, Systems with them, and adapters to openmm-ml and openmmtools."""
