"""Training of a TensorNet on GFN2-xTB for alanine dipeptide; run by ``train_alanine_dipeptide.py``."""
