"""OpenAI's interface of speech: sounds come as forms, and their windows go to the engine as prompts."""
