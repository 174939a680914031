"""Interactive charts of a saved run; `charts` lists them. A file holds one, or a few that share their parts.

from driftlens_reports.charts.chart import ChartOptions, charts

chart = charts["layer-drift"]
reason = chart.missing(run, options)     # None, or what is missing and the command that adds it
drawn = chart.draw(run, options)         # figure, alt text and the plotted numbers
"""
