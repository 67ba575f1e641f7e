"""The procedural face renderer behind `visard.data.synthetic`: numpy only, no assets."""
