"""Pages of the documentation that are read off the code when the site is built.

Nothing here is part of the product; `mkdocs.yml` names `handbook/hooks.py`.
"""
