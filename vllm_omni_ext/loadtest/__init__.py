"""Load of spoken answers on a server with OpenAI's APIs, and the times at its clients."""
