"""Clustering of features into identities, and how good a clustering is."""
