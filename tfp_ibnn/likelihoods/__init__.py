"""What a network's output means: classes, answers, numbers, or what you add."""

from tfp_ibnn.likelihoods.base import Likelihood as Likelihood
from tfp_ibnn.likelihoods.categorical import Categorical as Categorical
from tfp_ibnn.likelihoods.dirichlet import Beta as Beta
from tfp_ibnn.likelihoods.dirichlet import Dirichlet as Dirichlet
from tfp_ibnn.likelihoods.distribution import Distribution as Distribution
from tfp_ibnn.likelihoods.gaussian import Gaussian as Gaussian
from tfp_ibnn.likelihoods.gaussian import Point as Point
from tfp_ibnn.likelihoods.labels import Labels as Labels
from tfp_ibnn.likelihoods.numbers import Numbers as Numbers
from tfp_ibnn.likelihoods.predicted_quantiles import Quantiles as Quantiles
from tfp_ibnn.likelihoods.second_order import SecondOrder as SecondOrder
from tfp_ibnn.likelihoods.spread import SpreadGaussian as SpreadGaussian
from tfp_ibnn.likelihoods.spread import SpreadPoint as SpreadPoint
