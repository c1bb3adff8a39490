"""Results of measurements: intervals, JSON files, tables, plots, the page."""
