"""Tool calls and reasoning in a model's text, and OpenAI's shapes of them.

derive.py finds out from a chat template how its model writes calls (syntax.py; known.py has those that a template does
not show), parser.py reads them from text in pieces (events.py), deltas.py and messages.py are OpenAI's side of answers
and of requests, tools.py checks what a request asks for, and constraint.py says what a forced call must look like.
Nothing here imports torch or Jinja.
"""
