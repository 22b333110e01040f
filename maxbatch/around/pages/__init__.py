"""One self-contained HTML page: plots by BokehJS, tables, light and dark, no network."""
