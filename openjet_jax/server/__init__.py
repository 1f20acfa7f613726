"""An HTTP server with the interface of OpenAI's, and a chat page. Needs the extra `server`."""
