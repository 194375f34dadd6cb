"""A question in the query parameters: of requests whose body is the input itself."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from serving.errors import ApiError

RECALL_MEANING = (
    "decide by the threshold for this recall: the class's own or, if validation had too few "
    "samples of the class, the pooled one of all classes"
)


class QuestionParameters(BaseModel):
    """`?classes=A&classes=B&recall=0.9`; a name that is none of these is an error, not ignored."""

    model_config = ConfigDict(extra="forbid")

    classes: list[str] = Field(
        default_factory=list, description="class names, or # and a number; repeat it for more"
    )
    recall: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description=RECALL_MEANING)
    threshold: Annotated[float, Field(allow_inf_nan=False)] | None = Field(
        None, description="decide by this score; not together with recall"
    )

    def needed_classes(self, most: int) -> list[str | int]:
        """The classes asked for; ApiError where there is none, or more than `most`."""
        if not self.classes:
            raise ApiError(
                422, "invalid_query", "classes: name at least one in the URL, as ?classes=NAME"
            )
        check_class_count(len(self.classes), most)
        return list(self.classes)


def check_class_count(count: int, most: int) -> None:
    """ApiError 413 for more than `most` classes in one question."""
    if count > most:
        raise ApiError(
            413, "too_many_classes", f"{count} classes in one request, at most {most}: split it"
        )
