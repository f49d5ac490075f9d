"""An HTTP server over an engine, with the routes and answers of OpenAI's API (extra `serve`)."""
