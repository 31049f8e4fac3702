"""Models of scikit-learn as skl2onnx writes them, each with rows; both packages must be installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

#: Rows to compute, and rows to fit models to.
_N, _N_FITTED = 100, 500


def sklearn_models() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield the name of each model, the model as ONNX, and values for its inputs."""
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import FloatTensorType, StringTensorType

    x, labels, target, table, texts = _data()
    for name, model in _of_numbers().items():
        is_classifier = name.split()[0] in _CLASSIFIERS
        fitted = model.fit(x, labels if is_classifier else target)
        yield name, to_onnx(fitted, x[:1]), {"X": x[:_N]}
    without_map = _of_numbers()["forest"].fit(x, labels)
    yield "forest without ZipMap", to_onnx(without_map, x[:1], options={"zipmap": False}), {"X": x[:_N]}
    columns = [("city", StringTensorType([None, 1])), ("age", FloatTensorType([None, 1]))]
    encoded = to_onnx(_of_table().fit(table, labels), initial_types=columns)
    values = {name: table[name].to_numpy()[:_N, None] for name in table}
    yield "one-hot encoder", encoded, values
    pipeline = _of_texts().fit(texts, labels)
    # Not each machine has the locale that skl2onnx would choose.
    locale = {id(pipeline[0]): {"locale": "C"}}
    columns = [("text", StringTensorType([None, 1]))]
    model = to_onnx(pipeline, initial_types=columns, options=locale)
    yield "TF-IDF", model, {"text": np.array(texts[:_N], object)[:, None]}


#: First words of the names of models that are fitted to labels.
_CLASSIFIERS = ("forest", "boosting", "SVM", "logistic", "neighbours", "network", "Bayes")


def _data() -> tuple[Any, ...]:
    import pandas as pd

    rng = np.random.default_rng(0)
    x = rng.standard_normal((_N_FITTED, 10), np.float32)
    score = x[:, 0] + x[:, 1] * x[:, 2]
    labels = np.array(["low", "middle", "high"])[np.digitize(score, [-0.5, 0.5])]
    cities = np.array(["Bern", "Rome", "Oslo"], object)[rng.integers(0, 3, _N_FITTED)]
    table = pd.DataFrame({"city": cities, "age": (40 + 10 * x[:, 0]).astype("float32")})
    table["city"] = table["city"].astype(object)
    words = np.array(["red", "green", "blue", "one", "two", "three", "north", "south"])
    texts = [" ".join(words[rng.integers(0, len(words), 12)]) for _ in range(_N_FITTED)]
    return x, labels, score.astype("float32"), table, texts


def _of_numbers() -> dict[str, Any]:
    from sklearn.cluster import KMeans
    from sklearn.decomposition import PCA
    from sklearn.ensemble import (
        GradientBoostingClassifier,
        GradientBoostingRegressor,
        RandomForestClassifier,
    )
    from sklearn.linear_model import LogisticRegression
    from sklearn.naive_bayes import GaussianNB
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import SVC, SVR

    return {
        "forest": RandomForestClassifier(50, random_state=0),
        "boosting": GradientBoostingClassifier(n_estimators=30, random_state=0),
        "boosted regression": GradientBoostingRegressor(n_estimators=50, random_state=0),
        "SVM": SVC(),
        "SVM with probabilities": make_pipeline(StandardScaler(), SVC(probability=True, random_state=0)),
        "regression by SVM": SVR(),
        "logistic regression": make_pipeline(StandardScaler(), LogisticRegression()),
        "neighbours": KNeighborsClassifier(),
        "network after PCA": make_pipeline(PCA(5), MLPClassifier((20,), max_iter=50, random_state=0)),
        "Bayes": GaussianNB(),
        "k-means": KMeans(3, n_init=1, random_state=0),
    }


def _of_table() -> Any:
    from sklearn.compose import ColumnTransformer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    columns = [
        ("city", OneHotEncoder(handle_unknown="ignore"), ["city"]),
        ("age", StandardScaler(), ["age"]),
    ]
    return make_pipeline(ColumnTransformer(columns), LogisticRegression())


def _of_texts() -> Any:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    return make_pipeline(TfidfVectorizer(ngram_range=(1, 2)), LogisticRegression())
