"""What can be known of a spec or a calibration before it starts."""
