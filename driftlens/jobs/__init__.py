"""Where the rooms meet: opening what a spec names, walking it, storing what was found."""
