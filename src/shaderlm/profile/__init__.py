"""Where a step's time goes: measurements, files and the page that shows them."""
