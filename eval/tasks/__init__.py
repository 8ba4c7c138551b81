"""What a trained run is worth: one file for the measures of each task, one for its table."""
