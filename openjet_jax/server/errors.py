"""Errors in the form that OpenAI's clients read."""


class ApiError(Exception):
    """An answer other than 200.

    Attributes:
      status: of HTTP.
      message: what is wrong, the limit and the way out.
      param: the field it is about, as a path such as `messages[0].content`.
      code: a word for programs.
      headers: to be sent along.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        """Takes what the attributes say."""
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    def as_dict(self) -> dict[str, object]:
        """Returns the body."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 401:
            kind = "authentication_error"
        elif self.status == 429:
            kind = "rate_limit_error"
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Returns an error of status 400."""
    return ApiError(400, message, param=param, code=code)
