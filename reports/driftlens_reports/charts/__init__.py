"""Interactive charts of a saved run, one file each; `charts` lists them.

from driftlens_reports.charts.chart import ChartOptions, charts

chart = charts["layer-drift"]
reason = chart.missing(run, options)     # None, or what is missing and the command that adds it
drawn = chart.draw(run, options)         # figure, alt text and the plotted numbers
"""
