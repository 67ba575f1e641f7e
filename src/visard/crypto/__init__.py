"""Additively homomorphic encryption for the encrypted-MMD method; needs the extra `crypto` (gmpy2)."""
