"""Results of measurements: figures with intervals, JSON files, tables, plots and the HTML page."""
