"""Tool calls and reasoning in a model's text, and OpenAI's shapes of them.

derive.py finds out from a chat template how its model writes calls (syntax.py; known.py has those that a template does
not show), parser.py reads them from text in pieces (events.py), messages.py has OpenAI's side of requests and answers,
tools.py checks what a request asks for, and constraint.py says what a forced call must look like. Nothing here imports
torch or Jinja.
"""
