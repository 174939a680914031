"""Exhibits for a paper, one file each; `exhibits` lists them. Figures are matplotlib's, tables LaTeX and CSV."""
