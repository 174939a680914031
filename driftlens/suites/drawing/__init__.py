"""What the drawn tasks share: colours, backgrounds, glyphs, placement, and the cameras."""
