"""`gammalm inspect`: what any model's files say of its initialization, its weights and what to expect, as figures, text and a page.

`subject` finds out what a path is and opens it, `figures` measures and predicts, `text` and `page` show. From Python:

    from gammalm.inspection import inspect_model, text_of, page_of
    found = inspect_model("path/of/a/model")      # a JSON-ready dict
    print(text_of(found)); html = page_of(found)
"""

from gammalm.inspection.figures import inspect_config, inspect_model
from gammalm.inspection.page import page_of
from gammalm.inspection.text import text_of

__all__ = ["inspect_config", "inspect_model", "page_of", "text_of"]
