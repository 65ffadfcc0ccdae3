"""Posteriors over a layer's multiplicative noise z or its weights, and their priors."""

from tfp_ibnn._core.protocols import Draw as Draw
from tfp_ibnn._core.protocols import PosteriorTemplate as PosteriorTemplate
from tfp_ibnn._core.protocols import ZPosterior as ZPosterior
from tfp_ibnn.posteriors import priors as priors
from tfp_ibnn.posteriors.base import Posterior as Posterior
from tfp_ibnn.posteriors.base import Template as Template
from tfp_ibnn.posteriors.deep_recipes import NormalGlowStep as NormalGlowStep
from tfp_ibnn.posteriors.deep_recipes import NormalIAF as NormalIAF
from tfp_ibnn.posteriors.deep_recipes import NormalInvConv as NormalInvConv
from tfp_ibnn.posteriors.flow import FlowPosterior as FlowPosterior
from tfp_ibnn.posteriors.gaussian import NormalFull as NormalFull
from tfp_ibnn.posteriors.gaussian import NormalLowRank as NormalLowRank
from tfp_ibnn.posteriors.joint import JointPosterior as JointPosterior
from tfp_ibnn.posteriors.mean_field import MeanField as MeanField
from tfp_ibnn.posteriors.mixture import MixturePosterior as MixturePosterior
from tfp_ibnn.posteriors.mnf import MNF as MNF
from tfp_ibnn.posteriors.recipes import NormalAffine as NormalAffine
from tfp_ibnn.posteriors.recipes import NormalPlanar1d as NormalPlanar1d
from tfp_ibnn.posteriors.recipes import NormalRadial as NormalRadial
from tfp_ibnn.posteriors.recipes import NormalSylvester as NormalSylvester
