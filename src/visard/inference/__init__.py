"""A trained model at work: features, galleries, export."""
