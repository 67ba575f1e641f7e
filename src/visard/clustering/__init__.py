"""Clustering of features into people, and how good a clustering is."""
