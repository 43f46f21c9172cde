"""`jshadow serve`: an HTTP server with OpenAI's routes, over `jshadow.serving.Engine` and `jshadow.Library`."""
