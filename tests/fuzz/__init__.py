"""Generated calls, records, templates and configurations."""
