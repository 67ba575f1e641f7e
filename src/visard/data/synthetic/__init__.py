"""The procedural face renderer behind `visard.data.synthetic.sets`: numpy only, no assets."""
