"""Tables as text, LaTeX and pages."""
