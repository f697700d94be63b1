"""One picture a file, each described once as shapes; the report draws them as SVG, commands and notebooks with matplotlib."""
