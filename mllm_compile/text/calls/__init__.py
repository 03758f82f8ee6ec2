"""Tool calls and reasoning in a model's text, and OpenAI's shapes of them.

derive.py derives from a chat template how its model writes calls (syntax.py; known.py has syntaxes that a template does
not show). parser.py reads them from text in pieces (events.py). messages.py has OpenAI's side of requests and answers.
tools.py checks a request's tools. constraint.py has the grammar of a forced call. Nothing here imports torch or Jinja.
"""
