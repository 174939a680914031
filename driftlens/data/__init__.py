"""Where samples come from: one file per kind of source, drawing, class names, live Python objects."""
